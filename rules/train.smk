"""EAGLE-3 drafters.

Inputs: results/<run>/{hidden,vocab,target}/, and merged/ where states come and go. Outputs: results/<run>/drafters/<drafter>/, which SGLang loads.
"""


rule train:
    """One drafter, trained and exported."""
    input:
        hidden="results/{run}/hidden/manifest.json",
        vocab="results/{run}/vocab/manifest.json",
        target="results/{run}/target/manifest.json",
        merged=rolled_rows,
        base=start_drafter,
    output:
        manifest=update("results/{run}/drafters/{drafter}/manifest.json"),
        config=update("results/{run}/drafters/{drafter}/config.json"),
        model=update("results/{run}/drafters/{drafter}/model.safetensors"),
        training=update("results/{run}/drafters/{drafter}/training.json"),
        curves=update("results/{run}/drafters/{drafter}/curves.csv"),
    log:
        "results/{run}/logs/train/{drafter}.log",
    benchmark:
        "results/{run}/logs/train/{drafter}.benchmark.jsonl"
    priority: 1  # before any cell: servers of a benchmark hold GPU memory for a while
    conda:
        "../envs/aerie.yaml"
    threads: THREADS["train"]
    resources:
        gpu=GPUS * config["runtime"].get("ranks", 1),
        memory_mb=train_memory,
    params:
        **code("scripts/train.py"),
        settings=train_settings,
        runtime=train_machine,
        launcher=launcher,
    shell:
        r"""
        {params.launcher} -m scripts.train \
            --hidden {input.hidden:q} \
            --vocab {input.vocab:q} \
            --target {input.target:q} \
            --merged {input.merged:q} \
            --base {input.base:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            --runtime {params.runtime:q} \
            2>&1 | tee {log:q}
        """
