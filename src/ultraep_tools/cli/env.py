"""`ultraep env`: the facts of `ultraep check --level 1`, without running kernels."""

from __future__ import annotations

import json
from functools import partial

from ultraep.policies import policy_names
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.check import WIDTH, print_finding
from ultraep_tools.cli.terminal import Terminal

EXAMPLE = "Example: ultraep env --json > env.json"


class EnvOptions(cli.Options):
    as_json: bool = cli.json_option()


@cli.with_options
def command(options: EnvOptions) -> None:
    """Show versions, devices, frameworks and policies; runs nothing.

    `ultraep check` also runs kernels, and checks groups of ranks.
    """
    from ultraep_tools.check.host import check_host

    terminal = Terminal(width=WIDTH)
    shown = (lambda _: None) if options.as_json else partial(print_finding, terminal)
    findings = check_host(shown, kernels_too=False)
    if options.as_json:
        facts = {finding.part: finding.facts for finding in findings}
        print(json.dumps(facts | {"policies": policy_names()}, indent=2))
    else:
        terminal.print(f"{'policies':<20}{', '.join(policy_names())}", soft_wrap=True)
