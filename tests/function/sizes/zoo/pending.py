"""Cases that one program could serve, and that an engine refuses so far: nobody wrote the rule.

A line has the word that the reason contains. Delete it when the rule is there: the test of the case
fails until then, because it is refused no more.
"""

from __future__ import annotations

from dataclasses import replace

from .base import CASES

PENDING: dict[str, dict[str, str]] = {
    "jax": {
        # JAX multiplies one by one, for which it counts.
        "product_of_errors": "as a number",
        # JAX's own gradient of a convolution asks for the number of windows.
        "conv1d_strided": "",
        "conv1d_strided_same": "",
        # With "same", half of the padding of a strided window is in front, and depends on the size.
        "max_pooling1d_same": "`reduce_window_max`",
        "average_pooling1d_same": "`reduce_window_sum`",
        # Keras runs through the steps in Python.
        "time_distributed": "as a number",
        "time_distributed_conv": "as a number",
    },
    "tensorflow": {
        # Keras takes the rows for the steps when the number of steps is unknown.
        "time_distributed": "TimeDistributed",
        "time_distributed_conv": "TimeDistributed",
    },
    "torch": {
        # Keras on torch runs through the steps of a recurrence in Python.
        **dict.fromkeys(
            (
                "lstm",
                "gru",
                "gru_reset_before",
                "simple_rnn",
                "lstm_go_backwards",
                "lstm_each_step",
                "gru_each_step_go_backwards",
                "bidirectional_lstm",
                "bidirectional_gru_each_step",
                "stacked_rnns",
                "lstm_with_dropout",
                "rnn_of_stacked_cells",
                "masked_lstm",
                "masked_gru",
                "masked_stack",
                "masked_bidirectional",
                "masking_layer",
                "conv_lstm_1d",
                "conv_then_lstm",
                "time_distributed",
                "time_distributed_conv",
                "encoder_and_decoder",
                "scan_over_time",
                "connectionist_temporal_classification",
            ),
            "`time` is needed as a number",
        ),
        "scan_over_batch": "`batch` is needed as a number",
        # Here Keras on torch makes Python's numbers of the batch's size.
        "layer_conv_lstm2d": "keras.src.backend.torch.rnn",
        "layer_random_rotation": "affine_transform",
        "layer_random_zoom": "affine_transform",
        "layer_random_translation": "affine_transform",
        "metric_mean_iou": "scatter",
    },
}


def apply() -> None:
    """Expects the refusals."""
    for engine, words in PENDING.items():
        for name, word in words.items():
            case = CASES[name]
            CASES[name] = replace(
                case,
                expected={**case.expected, engine: "refused"},
                reasons={**case.reasons, engine: word},
            )
