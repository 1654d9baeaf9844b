"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# No test fails because a machine is slow. Else as hypothesis has it: other examples in each run, and always the same
# ones where the variable `CI` is set.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
