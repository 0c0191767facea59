"""Entry of every harness process: `python -I harness/__main__.py ROLE` with OVERNIGHT_BOOT set by the agent.

Started isolated (-I), so that neither the current folder nor PYTHONPATH decides what `import torch` means; the search
path of the agent, without the user's working folder, arrives in OVERNIGHT_BOOT together with the channel's descriptors.
"""

import json
import os
import sys


def main() -> int:
    """Set the path, then hand over to `harness.server`."""
    boot = json.loads(os.environ.pop("OVERNIGHT_BOOT"))
    sys.path[:] = boot["path"]
    if boot.get("cores"):  # before torch counts them
        os.sched_setaffinity(0, boot["cores"])
    from harness import server

    return server.serve(sys.argv[1], request_fd=boot["request_fd"], reply_fd=boot["reply_fd"])


if __name__ == "__main__":
    raise SystemExit(main())
