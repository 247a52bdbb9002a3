"""Geometries of convolutions."""

GEOMETRIES = {
    "1x1": dict(kernel_size=1),
    "1x1 strided": dict(kernel_size=1, stride=2),
    "padded": dict(kernel_size=3, padding=1),
    "uneven": dict(kernel_size=(3, 2), stride=(2, 3), padding=(1, 0), dilation=(1, 2)),
    "same": dict(kernel_size=4, padding="same"),
    "same, dilated": dict(kernel_size=(2, 3), padding="same", dilation=(3, 2)),
    "valid": dict(kernel_size=3, padding="valid"),
    "reflect": dict(kernel_size=3, padding=2, padding_mode="reflect"),
    "same, circular": dict(kernel_size=(4, 3), padding="same", padding_mode="circular"),
    "replicate": dict(kernel_size=3, padding=(2, 1), stride=2, padding_mode="replicate"),
    "groups": dict(kernel_size=3, padding=1, groups=2),
    "depthwise": dict(kernel_size=3, stride=2, padding=1, groups=4),
}
