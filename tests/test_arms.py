"""Arms that test_experiments.py does not train."""

from modeling_elmo.run_scripts.experiments.arms import experiment_arms


def test_one_arm_per_layer():
    arms = experiment_arms("each_layer", False, True, num_layers=3)
    assert [arm.name for arm in arms] == ["token layer", "biLSTM 1", "biLSTM 2", "biLSTM 3"]
    assert [arm.overrides for arm in arms] == [{"scalar_mix_mode": layer} for layer in range(4)]


def test_without_elmo_there_is_only_the_baseline():
    assert [arm.name for arm in experiment_arms(None, False, False, num_layers=2)] == ["baseline"]
