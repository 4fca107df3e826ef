"""``idmm completion``: the script with which a shell completes commands and flags, made by
shtab."""

import argparse

from idmm.config.parsing import flag_parser


def script(shell: str, commands: dict[str, tuple[type, bool]]) -> str:
    """Return the script of a shell (bash, zsh or fish).

    Args:
        commands: By name: the config, and whether words may stand without their flags.
    """
    import shtab

    parser = argparse.ArgumentParser("idmm")
    groups = {"": parser.add_subparsers()}
    for name, (config, has_words) in commands.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            parent = groups[""].choices.get(group) or groups[""].add_parser(group, help="")
            groups[group] = parent.add_subparsers()
        flags = flag_parser(config, name)
        if has_words:
            flags.add_argument("words", nargs="*", metavar="FILE")
        for action in flags._actions:
            if action.metavar:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # argparse declares none
        groups[group].add_parser(word, parents=[flags], add_help=False, help=flags.description)
    return shtab.complete(parser, shell)
