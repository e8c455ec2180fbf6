"""`make test` leaves these tests out; `make test-frameworks` runs them."""

from pathlib import Path

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    """Ignore the tests unless the command line names a path inside of this folder."""
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(HERE in path.parents for path in paths) else True
