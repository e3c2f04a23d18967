"""Files to begin with, as `trajlake template` writes them: modules here, so that they are checked like any other."""
