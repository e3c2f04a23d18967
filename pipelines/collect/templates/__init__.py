"""Example files that `trajlake template` writes. They are modules, so that they are checked like other code."""
