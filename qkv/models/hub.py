"""Whether the Hugging Face hub can be reached, found out in seconds; its own libraries retry for a minute.

Takes: nothing but the environment (HF_ENDPOINT, HF_HUB_OFFLINE, proxies). Gives: the reason why not, in words, or None.
Does not know about: models, data sets.
"""

import threading

TIMEOUT_S = 5.0


def unreachable() -> str | None:
    """None if the hub answers. Not cached: networks come and go. At most TIMEOUT_S, name resolution included."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
        except Exception as error:  # the classes differ between versions of the hub's library; any answer at all is none of them
            answers.append(f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})")
        else:
            answers.append(None)

    thread = threading.Thread(target=ask, name="qkv hub", daemon=True)  # a name server that is silent cannot be interrupted
    thread.start()
    thread.join(TIMEOUT_S)
    return answers[0] if answers else f"{constants.ENDPOINT} does not answer within {TIMEOUT_S:.0f} s"
