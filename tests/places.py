"""Where the repository and the fixtures of the tests are."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
TEXT = FIXTURES / "text"
ELMO_FIXTURES = FIXTURES / "elmo_fixtures"
