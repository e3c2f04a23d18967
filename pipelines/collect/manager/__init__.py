"""The manager: everything about many rollouts, of which a player knows one.

How many run at once, time-outs, attempts, siblings, rounds and their tasks, what is left when the process dies, and
what a round came to. Its state is in two places, and nowhere else: rollouts that run are in a spool on this machine, as
they happen; all that has ended is in the lake, the plan of each round with it (the started row of its `collect` job).
A killed process goes on from these two with the same command.
"""
