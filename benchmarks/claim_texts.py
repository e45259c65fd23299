"""Every claim: its id, what is claimed, and the figure of the paper."""

from __future__ import annotations

from verdicts import Claim, Test

OURS, NONE = "ours; no figure in the papers", "no single figure"
LACKING = {"A15": "no CLIP weights"}

TEXTS: dict[str, tuple[str, str]] = {
    "F1": (
        "Early hard masking is faithful by construction: nothing outside the mask can change the prediction.",
        "by construction; late and soft masking must fail the same test",
    ),
    "F2": ("Early masking beats late masking, both with true masks.", "worst group 97.2 against 84.0"),
    "F3": (
        "iFAM beats PDiscoFormer with as many parts.",
        "worst group 96.4 against 87.4 (K=4), 97.0 against 84.3 (K=8)",
    ),
    "F4": ("iFAM beats the fine-tuned backbone and the frozen probe.", "worst group 97.0 (K=8) against 95.8 and 88.5"),
    "F5": ("iFAM comes within 1 point of early masking with true masks.", "worst group 97.0 (K=8) against 97.2"),
    "F6": (
        "iFAM beats early masking with an external saliency detector.",
        "worst group 97.0 (K=8) against 95.2 (FOUND)",
    ),
    "F7": (
        "What stage 2 learns refines stage 1 through the straight-through mask: better predictions, better masks.",
        "claimed without a figure; the released code passes no gradient",
    ),
    "F8": ("Removing stage 2 costs most.", "WB200 86.1 to 76.0; MetaShift worst group 88.6 to 75.5"),
    "F9": ("Soft masks gain in distribution and lose out of it.", "90.6 and 85.7 against 90.1 and 86.1"),
    "F10": ("Without the losses that shape parts robustness falls.", "86.1 to 80.2"),
    "F11": ("Without stage 1's classification loss accuracy falls.", "85.0 without"),
    "F12": ("With a frozen stage 2 accuracy falls.", "83.7 frozen"),
    "F13": ("A part dropout of 0.3 is the best of 0, 0.1, 0.3 and 0.5.", NONE),
    "F14": ("Fine-tuning gains in distribution and loses out of it.", "91.6 and 68.4 against 89.2 and 76.6 frozen"),
    "F15": ("Late masking saturates even with true masks.", "about 76"),
    "F16": ("Too many parts pick up spurious regions.", "MetaShift, K=8: falls to 78.8"),
    "F17": ("Removing the spurious part, found on validation data, raises the worst group.", "+2.9"),
    "F18": ("Removing tokens helps out of distribution and sharpens the masks.", "+0.5 to +1.1; IoU +1.5 to +3.8"),
    "F19": ("Removing parts and removing tokens add up.", "+4.2"),
    "F20": ("Both help iFAM more than PDiscoFormer.", NONE),
    "F21": ("iFAM has the smallest gap between backgrounds of its class and random ones.", "2.4; others 3.6 to 12.5"),
    "F22": ("Stage 2's sparsity keeps the cost near that of one dense ViT.", NONE),
    "F23": ("Mixed precision and averaged weights cost no accuracy and save time.", "3.5 times as fast"),
    "A1": ("Within a self-supervised family smaller models localise better.", "mass .820 S, .764 B, .650 L, .608 g"),
    "A2": ("That does not hold of other kinds of pretraining.", NONE),
    "A3": ("Crops at attention peaks raise the worst group over the whole image.", "S with S: 72.7 to 80.4"),
    "A4": ("Small attention with a large embedder beats large with large.", "94.4 against 89.9"),
    "A5": ("Crops and DFR add up.", "Spawrious: 74.9 to 88.8"),
    "A6": ("A centre crop rivals attention only because birds sit in the middle.", "off-centre: 84.5 against 91.4"),
    "A7": ("iFAM leans on the centre more than attention crops do.", "−18.2 against −10.6"),
    "A8": ("The stronger the spurious cue, the fewer crops are best.", "1 crop 91.5, 4 crops 86.0"),
    "A9": ("How heads are averaged does not matter, and a sharper map is not a better one.", NONE),
    "A10": ("How well a method localises predicts how well it classifies.", NONE),
    "A11": ("An adapter of 3,000 parameters moves attention to the object.", "worst group 23 to 66"),
    "A12": ("With shared contexts iFAM wins, with disjoint ones attention crops do.", NONE),
    "A13": ("Larger models shift attention to registers in late blocks while localisation falls.", NONE),
    "A14": ("Part of the margin of attention crops is an untuned logistic regression.", OURS),
    "A15": ("Zero-shot CLIP on the crop beats CLIP on the whole image.", NONE),
    "R1": ("Three masks per class raise accuracy under shift at a small cost.", "ImageNet-A +7.6, ImageNet −1.2"),
    "R2": ("GAE is a better target than rollout or raw attention.", "24.1 against 23.4 and 21.7"),
    "R3": ("Each term of the loss is needed; background or foreground alone collapse.", NONE),
    "R4": ("Boosting the model's own confidence beats label cross-entropy under shift.", NONE),
    "R5": ("RRR and GradMask help less.", NONE),
    "R6": ("Classes that were not fine-tuned on gain as much as the others.", NONE),
    "R7": ("Three samples for half of the classes are enough.", NONE),
    "R8": ("Relevance maps stay faithful after fine-tuning.", NONE),
    "R9": ("Nearest neighbours improve on classes not seen.", NONE),
    "R10": ("Some 'sufficient' pixels exist for any label: they explain nothing.", "confidence above 90 %"),
    "R11": ("Masks from an unsupervised method do nearly as well.", NONE),
    "R12": ("A fine-tuned self-supervised ViT gains too.", "DINO-B, ImageNet-A: 16.4 to 19.1"),
    "B1": ("The shape of a discovered mask alone tells the label better than chance.", OURS),
    "B2": ("Some pairing of where and what beats every published one.", OURS),
    "B3": ("Patch masks leak background at their border; pixel-exact sight closes the gap.", OURS),
    "B4": ("Our default beats every rival that uses no group labels by 5 points of worst group.", OURS),
    "B5": ("Our default beats every rival that uses group labels by 1 point of worst group.", OURS),
    "I1": ("Leaving out parts finds the one that took the shortcut.", OURS),
    "I2": ("On pure noise the search finds nothing.", OURS),
}  # fmt: skip


def claim(id: str, *tests: Test) -> Claim:
    return Claim(id, *TEXTS[id], tests=tests, lacks=LACKING.get(id, ""))
