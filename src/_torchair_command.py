"""The start of the `torchair` command. While this module is loaded, `import torchair` leaves torch
to the command that needs it: `torchair --help` answers in a tenth of a second.
"""


def main() -> int:
    """Run the command line."""
    from torchair import begin
    from torchair.cli import main

    return main(begin=begin)
