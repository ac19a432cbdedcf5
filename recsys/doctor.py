"""`python -m recsys.doctor`: checks whether this installation can train, and says what to type if not.

The exit code is 0, or 5 if something is broken. Warnings (no compiler for export, an old ptxas) do not count
as broken.
"""

import sys
from collections.abc import Sequence

from recsys.doctor_checks import CheckResult, diagnose
from recsys.errors import InstallationError
from recsys.flags import Parser, PrintVersions


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m recsys.doctor", description="Check this installation.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="leave out compiling a package (about 30 s)")
    parser.add_argument("--version", action=PrintVersions, help="print the versions that matter and stop")
    options = parser.parse_args(arguments)
    broken = []
    for finding in diagnose(quick=options.quick):
        print(render(finding), flush=True)
        if finding.state == "error":
            broken.append(finding)
    if broken:
        print(f"\n{len(broken)} of the above must be repaired. Type:\n  {broken[0].remedy}")
        return InstallationError.exit_code
    print("\nready")
    return 0


def render(finding: CheckResult) -> str:
    """Formats a finding as text: state, name, detail, and the remedy on a separate line."""
    indent = "\n" + " " * 10
    text = f"{finding.state:<9} {finding.name}: " + finding.detail.replace("\n", indent)
    return text + (f"{indent}-> {finding.remedy}" if finding.remedy else "")


if __name__ == "__main__":
    sys.exit(main())
