"""The command line of `uptrain`. Its commands come with the training loop, which this version does not have yet."""

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(package_name="groupwise", prog_name="uptrain")
def main() -> None:
    """Uptrain a converted checkpoint: not part of this version yet. `convert` works."""
    raise click.ClickException("uptraining is not part of this version yet; only `convert` is.")
