"""Ray reads its environment when it is imported, so it is set before any test module is."""

import os

from deploy import local_ray

os.environ.update(local_ray.environment())
