import sys,time,os
sys.path.insert(0,'/work/main/tests')
from test_sharing import config, process_s, client, start, runs, Processes
def test_debug(client, processes):
    ws=(1.,2.,4.)
    rs=[start(client, config(weight=w)) for w in ws]
    processes.until(lambda: min(process_s(client, *rs)) > 0)
    before=process_s(client,*rs); t0=time.monotonic(); last=before; first=before
    print('first',before)
    for i in range(int(os.environ.get("NN","20"))):
        time.sleep(2.0)
        now=process_s(client,*rs); el=2
        d=[a-b for a,b in zip(now,last)]; tot=[a-b for a,b in zip(now,before)]
        print(round(time.monotonic()-t0,1), 'win',[round(x/sum(d)*7,2) for x in d], 'sum',[round(x/sum(tot)*7,2) for x in tot], 'use', round(sum(d)/(2*2.0),3), 'waiting',[runs.state(client,r).waiting for r in rs])
        last=now
