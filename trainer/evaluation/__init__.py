"""Evaluation of policies: success of their rollouts, and off-policy evaluation from another policy's episodes.

`eval` counts successes of recorded rollouts. `rescore` computes a checkpoint's log-probabilities of stored tokens, and
`ope` weighs recorded outcomes with them. Only rescoring loads torch.
"""
