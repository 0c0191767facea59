"""`python3 -m agent` is `overnight`.

The current folder is taken off the search path first, so that nothing of the user's shadows us.
"""

import sys
from pathlib import Path


def main() -> None:
    """Keep only our own checkout and what was installed on the search path, then hand over to the command line."""
    package_root = Path(__file__).resolve().parent.parent
    try:
        here = Path.cwd()
    except FileNotFoundError:
        print("overnight: the current folder no longer exists: change to one that does.", file=sys.stderr)
        raise SystemExit(2) from None
    entries = sys.path if sys.flags.safe_path else sys.path[1:]  # without -P or -I the first is the current folder
    rest = [entry for entry in entries if entry and Path(entry).resolve() not in {package_root, here}]
    sys.path[:] = [str(package_root), *rest]
    from agent.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
