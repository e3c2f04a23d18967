"""What policies are worth: measured success, and what stored trajectories say of a policy that did not take them.

`rescore` asks a checkpoint for the log-probabilities of stored tokens, `ope` weighs recorded outcomes with them
(off-policy evaluation), `eval` counts successes of the rollouts that there are. Only rescoring loads torch.
"""
