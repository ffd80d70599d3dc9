"""`python -m gpu_plugin`."""

import sys

from gpu_plugin.cli import main

sys.exit(main())
