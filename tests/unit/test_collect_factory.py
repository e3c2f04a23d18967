"""What a job's parameters say of how it was collected: all but keys, passwords and users in addresses."""

from pipelines.collect.factory import describe_options
from pipelines.collect.settings import PlayerOptions


def test_a_jobs_parameters_hold_no_secret() -> None:
    secret = {
        "api_key": "k-hidden-1",
        "nested": {"password": "hidden-2"},
        "header": "Authorization: Bearer hidden3hidden3",
    }
    engines = ("http://ann:hidden-4@10.0.0.1:8000", "http://10.0.0.2:8000/v1")
    settings = describe_options(PlayerOptions(env="gym:X", env_args={**secret, "level": 3}, engines=engines))
    assert "hidden" not in repr(settings)
    assert settings["engines"] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert settings["env_args"]["level"] == 3
    assert settings["env_args"]["api_key"] == "[redacted]"
