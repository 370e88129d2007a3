"""The command; see the package."""

from benchmarks.proxies.trying import MEASUREMENT

if __name__ == "__main__":
    MEASUREMENT.run()
