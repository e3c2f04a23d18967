"""The command line as one of several ranks: of `torchrun -m trainer train ...`, or of `trajlake train --ranks`."""

import atexit
import os
import sys
import time

if __name__ == "__main__":
    status = 130
    try:
        from trainer.backends.ranks import die_with_launcher

        die_with_launcher()
        from lake.cli import main

        main()
        status = 0
    except KeyboardInterrupt:
        """Before the command line was there to say so."""
    except RuntimeError:
        # Most often the echo of another rank's end, in the middle of what they do together: the launcher has ended this
        # one by then, and the cause is told alone.
        time.sleep(2)
        raise
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    # torch.distributed keeps modules alive beyond the interpreter's end, where DuckDB's bindings tell dozens of lines
    # about it. What has to be done at the end is done here, and then the process is over.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
