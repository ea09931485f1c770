"""Plans: how a model can be cut over ranks, found from its data flow and proven on fake tensors.

Rooms from the ground up; each imports only from those before it (``tests/test_architecture.py``):

======================  ============================================================================================
``splits``, ``styles``  how a tensor that is cut lies in the whole one; what a plan says of one module
``style_names``         what users, files, torch and Hugging Face call that
``plans/``              what is known of particular kinds of models, one file each
``modules/``            what a model's modules are, and what their code says: layers, experts, norms, numbers
``runs/``               runs of the model on fake tensors: which ops run, and what flows from layer to layer
``replays/``            runs of one rank's part, and the proof that it computes its part of the whole
``entries/``            the plan as data: entries with shapes, collectives and bytes; its file, its table
``hints``               what a user, a plan file or a ``tp_plan`` says
``alone/``              layers that are cut by themselves and gathered, or left whole
``proofs/``             which layers are cut together: groups, hypotheses of how, and the proof of each
``planner``             ``make_plan``: asks all of them, in this order
======================  ============================================================================================
"""
