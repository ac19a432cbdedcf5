"""Install this clone, editable, and everything it needs into the Python that runs this script.

    python scripts/install.py [--dev] [--dry-run]

`recsys.install` does the work and says how it chooses. This script is for a Python that has nothing installed
yet; standard library only.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells users of an older Python
    sys.stderr.write(f"{sys.executable} is Python {platform.python_version()}; recsys needs >= 3.10\n")
    sys.exit(5)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys.install import main

if __name__ == "__main__":
    sys.exit(main())
