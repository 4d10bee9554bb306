# Completion of lowtide for fish; written by tools/man_page.py.
complete -c lowtide -n __fish_use_subcommand -f -a generate -d 'Write one answer; notes on the plan and the speed go to standard error.'
complete -c lowtide -n __fish_use_subcommand -f -a chat -d 'Talk with a model, turn by turn; a model without a chat template continues the text.'
complete -c lowtide -n __fish_use_subcommand -f -a plan -d 'Show the memory that a model needs and would get here, and why.'
complete -c lowtide -n __fish_use_subcommand -f -a doctor -d 'Check this machine for faults; -v shows how fast its memory and disk are.'
complete -c lowtide -n __fish_use_subcommand -f -a serve -d 'Answer OpenAI, Anthropic and Ollama clients over HTTP, until Ctrl-C or SIGTERM.'
complete -c lowtide -n __fish_use_subcommand -f -a batch -d 'Answer a file of requests, one per line; an interrupted run resumes.'
complete -c lowtide -n __fish_use_subcommand -f -a bench -d 'Measure the machine, then a model\'s speed, under one policy or several.'
complete -c lowtide -n __fish_use_subcommand -f -a verify -d 'Prove that budgets and policies change no token and no bit; exit 1 if they do.'
complete -c lowtide -n __fish_use_subcommand -f -a calibrate -d 'Learn from a text which experts a model uses, so that policies keep the right ones.'
complete -c lowtide -n __fish_use_subcommand -f -a simulate -d 'Replay a recorded routing (generate --trace) under other policies and machines.'
complete -c lowtide -n __fish_use_subcommand -f -a quality -d 'Compare the quality and speed of settings such as --format q4 with the exact run.'
complete -c lowtide -n __fish_use_subcommand -f -a synth -d 'Write a model with random weights, to try and measure without a download.'
complete -c lowtide -n __fish_use_subcommand -f -a pack -d 'Save a model with weights rounded to 8 or 4 bits: smaller, and faster to read.'
complete -c lowtide -n __fish_use_subcommand -f -a pull -d 'Fetch a model from the hub: weights, configuration and tokenizer, never code.'
complete -c lowtide -n __fish_use_subcommand -f -a ls -d 'List the models that are on this machine.'
complete -c lowtide -n __fish_use_subcommand -f -a cache -d 'List the conversations that --cache-dir keeps on disk, or clear them.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l prompt -s p -d 'Prompt to answer; - reads standard input.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l prompt-ids -d 'Token ids in place of text: "5 17 3".' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l raw -l no-raw -d 'Send the text as it is, without the chat template.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l think -l no-think -d 'Think before answering, or not; for models that can do both.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l system -d 'System message.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l max-tokens -d 'Most tokens of the answer; unset: as many as the context leaves (LLaDA, Dream: 256).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l temperature -d 'Randomness of sampling: 0 always takes the likeliest token; unset: the model\'s own, or 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l top-k -d 'Draw only from the k likeliest tokens; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l top-p -d 'Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l min-p -d 'Drop tokens below this share of the likeliest one\'s probability, such as 0.05.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l repetition-penalty -d 'Above 1: discourage tokens of the prompt and the answer; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l presence-penalty -d 'Above 0: discourage tokens of the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l frequency-penalty -d 'Above 0: discourage a token once for each time it is in the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l seed -d 'Random seed; equal seeds give equal answers, whatever else runs; unset: 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l stop -d 'Text that ends the answer and is not part of it. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l ignore-eos -l no-ignore-eos -d 'Continue after the model\'s end-of-text token.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l logprobs -d 'Report log-probabilities of each token and of this many alternatives (--json).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l n -d 'Number of answers to each prompt. Default: 1.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l block-length -d 'Number of tokens denoised together; unset: the family\'s, or the whole answer.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l steps -d 'Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, Dream); fewer are faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l threshold -d 'Write a token above this probability, such as 0.9; less is faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l remasking -d 'Rule by which a step chooses the tokens it writes: low_confidence, random, origin, maskgit_plus, topk_margin, entropy, confidence_threshold, factor.' -x -a 'low_confidence random origin maskgit_plus topk_margin entropy confidence_threshold factor'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l edit-threshold -d 'Replace a written token if another one is above this probability (LLaDA2.1).' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l max-post-steps -d 'Most passes that may still edit a full block.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l cfg-scale -d 'Guidance strength of the prompt; above 0 each pass costs double.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l eos-early-stop -l no-eos-early-stop -d 'Stop at the end of the text instead of filling the block; unset: if the answer stays the same.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l eps -d 'Dream: time at which its schedule of steps ends; unset: 0.001.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l alg-temp -d 'Dream: temperature for drawing the positions to write; 0 takes the surest.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l factor -d 'Rule factor: a higher value writes more tokens at once, less surely; unset: 1.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l trace -d 'Record expert routing in this file, for simulate.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l quiet -s q -l no-quiet -d 'Print the answer alone: no plan, no speed.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from generate' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l url -d 'Talk with a server\'s model instead, such as http://localhost:8000.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l history -l no-history -d 'Remember what you type for next time.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l raw -l no-raw -d 'Send the text as it is, without the chat template.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l think -l no-think -d 'Think before answering, or not; for models that can do both.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l system -d 'System message.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l max-tokens -d 'Most tokens of the answer; unset: as many as the context leaves (LLaDA, Dream: 256).' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l temperature -d 'Randomness of sampling: 0 always takes the likeliest token; unset: the model\'s own, or 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l top-k -d 'Draw only from the k likeliest tokens; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l top-p -d 'Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l min-p -d 'Drop tokens below this share of the likeliest one\'s probability, such as 0.05.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l repetition-penalty -d 'Above 1: discourage tokens of the prompt and the answer; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l presence-penalty -d 'Above 0: discourage tokens of the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l frequency-penalty -d 'Above 0: discourage a token once for each time it is in the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l seed -d 'Random seed; equal seeds give equal answers, whatever else runs; unset: 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l stop -d 'Text that ends the answer and is not part of it. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l ignore-eos -l no-ignore-eos -d 'Continue after the model\'s end-of-text token.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l block-length -d 'Number of tokens denoised together; unset: the family\'s, or the whole answer.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l steps -d 'Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, Dream); fewer are faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l threshold -d 'Write a token above this probability, such as 0.9; less is faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l remasking -d 'Rule by which a step chooses the tokens it writes: low_confidence, random, origin, maskgit_plus, topk_margin, entropy, confidence_threshold, factor.' -x -a 'low_confidence random origin maskgit_plus topk_margin entropy confidence_threshold factor'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l edit-threshold -d 'Replace a written token if another one is above this probability (LLaDA2.1).' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l max-post-steps -d 'Most passes that may still edit a full block.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l cfg-scale -d 'Guidance strength of the prompt; above 0 each pass costs double.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l eos-early-stop -l no-eos-early-stop -d 'Stop at the end of the text instead of filling the block; unset: if the answer stays the same.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l eps -d 'Dream: time at which its schedule of steps ends; unset: 0.001.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l alg-temp -d 'Dream: temperature for drawing the positions to write; 0 takes the surest.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l factor -d 'Rule factor: a higher value writes more tokens at once, less surely; unset: 1.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from chat' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l plot -d 'Draw the memory of passes into this file (LLaDA, LLaDA-MoE, Dream).' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from plan' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l fresh -l no-fresh -d 'Repeat measurements made before.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from doctor' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l print-config -d 'Print a client\'s configuration and exit: codex, claude, continue, open-webui.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l host -d 'Address to listen on. Default: 127.0.0.1.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l port -d 'Port to listen on; 0 picks a free one. Default: 8000.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l api-key -d 'Key that requests must carry.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l auth -l no-auth -d 'Require a key if other machines can reach the server. Default: true.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l served-name -d 'Model name shown to clients.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l max-requests -d 'Most requests running and waiting at once. Default: 64.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l max-queued-tokens -d 'Most prompt tokens waiting; default: eight times the context.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l request-timeout -d 'Time limit of an answer in seconds, including waiting. Default: 3600.0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l allowed-host -d 'Additional name to accept in the Host header. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l allowed-origin -d 'Origin of web pages that may ask, such as http://localhost:3000. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from serve' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l input -s i -d 'Requests in OpenAI\'s batch format; - reads standard input.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l output -s o -d 'File for the answers, which a later run resumes; - is standard output.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l at-once -d 'Most lines answered at the same time; by default as many as the context holds, at most 256.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l shard -d 'Answer only part of the lines: 2/5 is every fifth, from the second on.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l in-order -l no-in-order -d 'Sort the answers into the order of the lines at the end.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l any-model -l no-any-model -d 'Use this model also for lines that name another one.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l ray -l no-ray -d 'Answer on all nodes of the Ray cluster at RAY_ADDRESS.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l strict -l no-strict -d 'Exit with 1 if a line\'s answer is an error.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l served-name -d 'Model name shown to clients.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from batch' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l prompt -s p -d 'Text to continue; random tokens if not given.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l repeats -d 'Number of answers timed for each policy or setting. Default: 3.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l profile -d 'Write this machine as a hardware profile, for simulate --machine.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l policy -d 'Policies to compare, separated by commas. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l max-tokens -d 'Length of each answer in tokens; unset: 64, or what the context leaves.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l temperature -d 'Randomness of sampling: 0 always takes the likeliest token; unset: the model\'s own, or 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l top-k -d 'Draw only from the k likeliest tokens; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l top-p -d 'Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l min-p -d 'Drop tokens below this share of the likeliest one\'s probability, such as 0.05.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l repetition-penalty -d 'Above 1: discourage tokens of the prompt and the answer; 1 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l presence-penalty -d 'Above 0: discourage tokens of the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l frequency-penalty -d 'Above 0: discourage a token once for each time it is in the answer; 0 is off.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l seed -d 'Random seed; equal seeds give equal answers, whatever else runs; unset: 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l ignore-eos -l no-ignore-eos -d 'Continue after the model\'s end-of-text token.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l logprobs -d 'Report log-probabilities of each token and of this many alternatives (--json).' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l block-length -d 'Number of tokens denoised together; unset: the family\'s, or the whole answer.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l steps -d 'Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, Dream); fewer are faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l threshold -d 'Write a token above this probability, such as 0.9; less is faster.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l remasking -d 'Rule by which a step chooses the tokens it writes: low_confidence, random, origin, maskgit_plus, topk_margin, entropy, confidence_threshold, factor.' -x -a 'low_confidence random origin maskgit_plus topk_margin entropy confidence_threshold factor'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l edit-threshold -d 'Replace a written token if another one is above this probability (LLaDA2.1).' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l max-post-steps -d 'Most passes that may still edit a full block.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l cfg-scale -d 'Guidance strength of the prompt; above 0 each pass costs double.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l eos-early-stop -l no-eos-early-stop -d 'Stop at the end of the text instead of filling the block; unset: if the answer stays the same.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l eps -d 'Dream: time at which its schedule of steps ends; unset: 0.001.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l alg-temp -d 'Dream: temperature for drawing the positions to write; 0 takes the surest.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l factor -d 'Rule factor: a higher value writes more tokens at once, less surely; unset: 1.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from bench' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from verify' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l plot -d 'Draw pictures into this folder.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l text -d 'Text file typical of the model\'s use.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l pieces -d 'How many parts of the text to run. Default: 16.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l inputs -l no-inputs -d 'Also record experts\' inputs, for pack and --format with --calibration.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l buddies -l no-buddies -d 'Also record which expert can stand in for which, for buddymoe.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l buddy-weights -l no-buddy-weights -d 'Count the tokens of two experts by the lesser of the two weights.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l buddy-temperature -d 'Temperature of a token\'s weights in buddymoe\'s entropy gate. Default: 1.0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l buddy-alpha -d 'Share of co-activations that buddies cover: one, one for each MoE layer (0.9,0.95), or the first and the last layer\'s (0.99:0.9).' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l out -d 'The file to write; by default one in your cache, where lowtide looks for it.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l machine -d 'Hardware profile for the table of refresh intervals; default: rtx3090.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from calibrate' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l machine -d 'Hardware profile: rtx3090, a100-40gb, laptop-8gb, ... or a TOML file. Default: rtx3090.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l residents -d 'Share of a layer\'s experts that fits into memory. Default: 0.5.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l tau -d 'Steps after which policy tide chooses residents again. Default: 4.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l policy -d 'Policies to compare, separated by commas; oracle knows the future. Default: tide, dali, lowtide, lru, fiddler, hybrimoe, layer-split.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l calibration -d 'File from calibrate --out, for policies that use it.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from simulate' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l host-memory -l memory -d 'Memory to use: 12G, 80% of the machine\'s, or auto; with a GPU, for experts only. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l gpu-memory -d 'GPU memory to use: 12G, 80%, or auto. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l policy -d 'Policy that keeps experts in memory; auto chooses one. Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l policy-option -d 'Option of the policy, such as tau=4. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l device -d 'Device to compute on: auto, cpu, cuda, or emulated (for tests). Default: auto.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l device-option -d 'Option of the emulated device, such as link_GBps=2. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l context -d 'Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit, running requests share it. Default: the model\'s, at most 4,096 (serve: more if memory allows).' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l dtype -d 'Data type to compute in, such as float32; default: the checkpoint\'s.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l format -d 'Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory, may change answers), or auto (the fastest by lowtide plan).' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l activations -d 'Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it. Default: auto.' -x -a 'auto own int8'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l kernels -d 'Kernels: auto, or reference (plain torch: slow, for comparison). Default: auto.' -x -a 'auto reference'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l kv-cache -d 'KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream) keep more and approximate. Default: true.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l cache -d 'Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens cannot change), off. Default: on.' -x -a 'on exact off'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l cache-dir -d 'Private folder that keeps conversations\' KV caches for later runs, unencrypted (not on a GPU).' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l cache-disk -d 'Most to keep in --cache-dir: 8GiB, 10% of the disk; the longest unused goes first. Default: 8GiB.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l cores -d 'Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such as 0,2-3; the process keeps to them until it ends.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l check-weights -l no-check-weights -d 'Read all weights first and refuse infinities and NaN.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l config-override -d 'Override a value of config.json, such as mask_token_id=7. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l setting -d 'Options to compare, as \'format=q4\' or \'policy=lru residents=0.5\'. A name given twice makes a row for each of its values. Repeatable.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l tokens -d 'Number of tokens of the text to score. Default: 2048.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l window -d 'Length of a scored window in tokens, at most. Default: 256.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l mask-ratios -d 'Shares of a diffusion model\'s tokens to hide, separated by commas. Default: 0.15,0.5,0.9.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l save-curve -l no-save-curve -d 'Measure the loss from replaced experts, for max_kl of buddymoe; kept with the buddies.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l choices -d 'File of multiple-choice questions, one JSON object per line.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l text -d 'Text file to score.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l plot -d 'Draw every setting\'s speed and loss into this file.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l max-tokens -d 'Tokens written to time a setting; 0: no timing. Default: 64.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l seed -d 'Random seed; equal seeds give equal answers, whatever else runs; unset: 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l repeats -d 'How often each setting writes. Default: 3.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l policy-file -d 'Python file with policies of your own, known to --policy by name.' -r
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from quality' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l size -d 'Size to write: tiny, small or full. Default: tiny.' -r
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l out -d 'The folder to write; it must be new or empty.' -r
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l seed -d 'Equal seeds write equal weights. Default: 0.' -r
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from synth' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l format -d 'Format to write: q8 or q4, weights rounded to 8 or 4 bits.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l expert-dtype -d 'Like --format, for experts only.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l dense-dtype -d 'Like --format, for everything but experts.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l calibration -d 'File from lowtide calibrate, if not in its default place.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l by-expert -l no-by-expert -d 'Copy a GGUF model\'s experts into a file beside it, each in one piece: faster to read.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l out -d 'The folder to write, itself a model; an interrupted run resumes there.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l offline -l no-offline -d 'Use only models that are on this machine.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l help-all -d 'Show all options.'
complete -c lowtide -n '__fish_seen_subcommand_from pack' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from pull' -a 'demo:autoregressive demo:diffusion'
complete -c lowtide -n '__fish_seen_subcommand_from pull' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from pull' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from pull' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from pull' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from ls' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from ls' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from ls' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from ls' -l help -d 'Show the most used options.'
complete -c lowtide -n '__fish_seen_subcommand_from cache' -l cache-dir -d 'The folder that models are run with; it must be given.' -r
complete -c lowtide -n '__fish_seen_subcommand_from cache' -l json -d 'Print one JSON object and nothing else.'
complete -c lowtide -n '__fish_seen_subcommand_from cache' -l verbose -s v -d 'Show more: the whole plan, all measurements, where an error came from.'
complete -c lowtide -n '__fish_seen_subcommand_from cache' -l config -d 'TOML file with any of these options.' -r
complete -c lowtide -n '__fish_seen_subcommand_from cache' -l help -d 'Show the most used options.'
