"""How Hypothesis works here: the same examples in every run, so that a failure is the change's that it comes with.

`HYPOTHESIS_PROFILE=search make test` looks for new ones.
"""

import os

from hypothesis import HealthCheck, settings

# A machine under load generates slowly: that says nothing about the code.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
