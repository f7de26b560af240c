"""Asks a public database for known vulnerabilities of the versions in constraints.txt.

    python tools/vulnerabilities.py pypi        # or osv

The work is pip-audit's. All versions are pinned, so that nothing is resolved, downloaded or
installed. Exit status 1 if there are any, and also if it is not known: pip-audit itself is content
with packages that it could not look up.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PINS = "constraints.txt"


def main(service: str) -> None:
    command = ["--requirement", str(ROOT / PINS), "--no-deps", "--disable-pip", "--format", "json"]
    command += ["--vulnerability-service", service, "--progress-spinner", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *command], capture_output=True, text=True
    )
    try:
        audited = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise SystemExit(
            f"nothing is known of the versions in {PINS}: the database {service!r} cannot be asked "
            f"from here: {last}"
        ) from None
    lines = [
        f"{package['name']} {package['version']}: {fault['id']}, fixed in "
        f"{', '.join(fault['fix_versions']) or 'no version'}"
        for package in audited
        for fault in package.get("vulns", [])
    ]
    for line in lines:
        print(line)
    unknown = [each["name"] for each in audited if "skip_reason" in each]
    if unknown:
        raise SystemExit(
            f"nothing is known of {len(unknown)} of the {len(audited)} packages in {PINS}, such as "
            f"{unknown[0]}: the database {service!r} does not know them, or cannot be reached from "
            "here"
        )
    if lines:
        raise SystemExit(f"{len(lines)} known vulnerabilities of the versions in {PINS}")
    print(f"no known vulnerability of the {len(audited)} packages in {PINS}, says {service!r}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/vulnerabilities.py SERVICE")
    main(sys.argv[1])
