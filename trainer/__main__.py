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
        """Ctrl-C came before the command line was loaded."""
    except RuntimeError:
        # Mostly a consequence of another rank's end during a collective call. The launcher ends this rank within two
        # seconds, so that only the cause is reported.
        time.sleep(2)
        raise
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    # torch.distributed keeps modules alive beyond the interpreter's end, and DuckDB's bindings print dozens of lines
    # about it. The process does its exit work here, and ends.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
