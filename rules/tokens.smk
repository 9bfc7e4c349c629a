"""Token rows, the shuffled mix, the draft vocabulary.

Inputs: results/<run>/{responses,prepared,target}/, with the benchmark tasks' prepared prompts. Outputs: results/<run>/{tokens,merged,vocab}/.
"""


rule encode:
    """Token ids and loss spans of one dataset."""
    input:
        rows=encode_rows,
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/tokens/{dataset}/manifest.json"),
    log:
        "results/{run}/logs/encode/{dataset}.log",
    benchmark:
        "results/{run}/logs/encode/{dataset}.benchmark.jsonl"
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/encode.py"),
        settings=encode_settings,
    shell:
        r"""
        python -m scripts.encode \
            --rows {input.rows:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """


rule merge:
    """All datasets in one seeded order, without copies and benchmark prompts, with a held-out split by conversation."""
    input:
        tokens=expand("results/{{run}}/tokens/{dataset}/manifest.json", dataset=DATASETS),
        prepared=expand("results/{{run}}/prepared/{dataset}/manifest.json", dataset=DATASETS),
        tasks=expand("results/{{run}}/prepared/{task}/manifest.json", task=TASKS),
    output:
        manifest=update("results/{run}/merged/manifest.json"),
    log:
        "results/{run}/logs/merge.log",
    benchmark:
        "results/{run}/logs/merge.benchmark.jsonl"
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/merge.py"),
        settings=merge_settings,
    shell:
        r"""
        python -m scripts.merge \
            --tokens {input.tokens:q} \
            --prepared {input.prepared:q} \
            --tasks {input.tasks:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """


rule vocab:
    """The draft vocabulary: the target's tokens that a drafter may propose."""
    input:
        merged="results/{run}/merged/manifest.json",
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/vocab/manifest.json"),
    log:
        "results/{run}/logs/vocab.log",
    benchmark:
        "results/{run}/logs/vocab.benchmark.jsonl"
    priority: 1  # as hidden: training needs both
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/vocab.py"),
        settings=settings("vocab"),
    shell:
        r"""
        python -m scripts.vocab \
            --merged {input.merged:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """
