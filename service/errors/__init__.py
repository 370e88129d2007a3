"""Every error that a caller may see, and one table from exceptions to gRPC's codes and details.

Exceptions are raised where their cause is known, and `status_table` maps each to a status. Refusals
are counted here too. This package does not depend on the packages that raise the errors.
"""
