"""An environment whose arguments are named."""

import verifiers as vf


def load_environment(count=40):
    return vf.SingleTurnEnv([{"prompt": f"{n}=", "answer": ""} for n in range(count)])
