"""`python -m demo`: run the real daemon on a simulated 8-GPU node under a stand-in kubelet, and print a timeline.

Needs no GPU, no cluster and no root, and leaves nothing behind. The exit status is 1 if a step did not happen.
"""

import sys

from demo.play import run

sys.exit(run(sys.stdout))
