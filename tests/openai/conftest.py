"""What tests of the door share: comparisons that say what differs."""

import pytest

pytest.register_assert_rewrite("tests.openai.asking", "tests.openai.doors")
