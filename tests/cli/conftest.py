"""The CLI tests use the handmade runs that lie beside the tests of the baseline."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
