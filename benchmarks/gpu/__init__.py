"""What the GPU engine does on one card: one script per question, all over the same loaded engine.

    python -m benchmarks.gpu.all [--only phases,corun] [--out DIR]
    python -m benchmarks.gpu.corun          # one script alone

Shapes of Llama-3.1-8B in bf16 with random weights and a cache of random keys and values: nothing here says anything
about answers, everything about time. Each script writes gpu_<script>.json and prints a short table.
"""
