set -u
cd benchmarks
nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv,noheader -lms 250 > $OUT/smi.csv &
SMI=$!
export PYTHONPATH=../src PYTHONUNBUFFERED=1
date +%T
V=old,oldnoh,drawnnoh,new,new4,newband6
for v in ${V//,/ }; do python probe_ragged.py warm $v q > /tmp/warm_$v.txt 2>&1 & done
python probe_ragged.py layers 0 > /tmp/warm_layers.txt 2>&1 &
for j in $(jobs -p); do [ $j != $SMI ] && wait $j; done
date +%T; tail -n 2 /tmp/warm_*.txt
timeout 90 python probe_ragged.py products $V $V 2>&1 | tee $OUT/products.txt
date +%T
timeout 60 python probe_ragged.py layers 4 2>&1 | tee $OUT/layers.txt
date +%T
kill $SMI
