"""The command; see the package."""

from benchmarks.languages.turns import MEASUREMENT

if __name__ == "__main__":
    MEASUREMENT.run()
