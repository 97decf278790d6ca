"""What the gateway's process loads: no compiler, for it decodes nothing."""

import subprocess
import sys


def test_the_gateway_reads_manifests_without_a_compiler() -> None:
    code = "import sys, slackwater.cli.gateway; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
