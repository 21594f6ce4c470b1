"""The arms that the options of an experiment ask for."""

from modeling_elmo.run_scripts.fine_tuning.arms import experiment_arms


def names_of(ablation: str | None, compare_baseline: bool, use_elmo: bool = True, num_layers: int = 2) -> list[str]:
    return [arm.name for arm in experiment_arms(ablation, compare_baseline, use_elmo, num_layers)]


def test_without_an_ablation():
    assert names_of(None, compare_baseline=False) == ["elmo"]
    assert names_of(None, compare_baseline=True) == ["baseline", "elmo"]
    assert names_of(None, compare_baseline=False, use_elmo=False) == ["baseline"]


def test_one_arm_per_layer():
    arms = experiment_arms("each_layer", False, True, num_layers=3)
    assert [arm.name for arm in arms] == ["token layer", "biLSTM 1", "biLSTM 2", "biLSTM 3"]
    assert [arm.overrides for arm in arms] == [{"scalar_mix_mode": layer} for layer in range(4)]


def test_training_sizes_have_a_baseline_each():
    arms = experiment_arms("data", True, True, num_layers=2)
    assert {arm.name: (arm.fraction, arm.overrides.get("use_elmo", True)) for arm in arms} == {
        **{f"elmo@{share}": (share, True) for share in (0.01, 0.1, 1.0)},
        **{f"baseline@{share}": (share, False) for share in (0.01, 0.1, 1.0)},
    }
