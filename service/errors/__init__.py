"""Every error that a caller may see, and one table from exceptions to gRPC's codes and details.

Exceptions are raised where their cause is known; `status_table` says what becomes of each. What was
refused is counted here too. It knows no room that raises.
"""
