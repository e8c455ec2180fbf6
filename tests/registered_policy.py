"""A policy as users register it: it plans on the host, and a balancer runs it.

Processes of a fork server import this module: it must not look for a GPU.
"""

import ultraep
from ultraep.policies import get_policy


@ultraep.register_policy("registered")
def registered(problem):
    return get_policy("quota").decide(problem)
