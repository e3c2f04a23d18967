"""The manager of many rollouts; a player only knows one.

It owns concurrency, timeouts, attempts, siblings, rounds and their tasks, recovery after a crash, and the report of a
round. Its state is in two places only. Running rollouts are in a spool on this machine, step by step. Finished ones are
in the lake, with the plan of each round in the started row of its `collect` job. After a crash, the same command
resumes from these two.
"""
