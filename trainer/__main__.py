"""`torchrun -m trainer train ...`: the command line as one of several ranks."""

import atexit
import os
import sys

from lake.cli import main

if __name__ == "__main__":
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    # torch.distributed keeps modules alive beyond the interpreter's end, where DuckDB's bindings tell dozens of lines
    # about it. What has to be done at the end is done here, and then the process is over.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
