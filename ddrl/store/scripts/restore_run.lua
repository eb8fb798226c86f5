-- Restore a run from a snapshot, whole or not at all. It may be sent twice: whoever finds its own checkpoint on the
-- server has restored the run.
-- KEYS: 1 state, 2 spec, 3 producers, 4 ledger, 5 weights, 6 experience, 7 journal, 8 runs (zset), 9 counter of
--       producers, 10 deleted runs (zset), 11 runs that have not ended (zset), 12 counts, 13... parts of the checkpoint
-- ARGV: 1 run, 2 state (JSON object), 3 spec, 4 producers (JSON object), 5 ledger (JSON object), 6 latest version,
--       7 cursor of the stream, 8 reason for the journal, 9 created ms, 10 least producer id, 11 restore a deleted run
--       too (1|0), 12 cap of the journal, 13 counts (JSON object)
-- Answer: 1 restored; 0 the run is on the server, or the parts of the checkpoint are gone; -1 the run was deleted.
if redis.call('HEXISTS', KEYS[1], 'status') == 1 then
  if redis.call('HGET', KEYS[1], 'checkpoint') == cjson.decode(ARGV[2])['checkpoint'] then return 1 end
  return 0
end
for i = 13, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
if redis.call('ZSCORE', KEYS[10], ARGV[1]) then
  if ARGV[11] ~= '1' then return -1 end
  redis.call('ZREM', KEYS[10], ARGV[1])
end
for i = 1, 7 do redis.call('DEL', KEYS[i]) end
redis.call('DEL', KEYS[12])
for i, at in ipairs({{1, 2}, {3, 4}, {4, 5}, {12, 13}}) do
  for name, value in pairs(cjson.decode(ARGV[at[2]])) do redis.call('HSET', KEYS[at[1]], name, value) end
end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[5], 'latest', ARGV[6])
if ARGV[7] ~= '0-0' then  -- so that new entries come after the learner's cursor, whatever the clock says
  redis.call('XADD', KEYS[6], ARGV[7], 'x', '')
  redis.call('XDEL', KEYS[6], ARGV[7])
end
redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[12], '*', 'event', 'restored', 'reason', ARGV[8])
if tonumber(redis.call('GET', KEYS[9]) or 0) < tonumber(ARGV[10]) then redis.call('SET', KEYS[9], ARGV[10]) end
redis.call('ZADD', KEYS[8], ARGV[9], ARGV[1])
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'active' or status == 'paused' then redis.call('ZADD', KEYS[11], ARGV[9], ARGV[1]) end
return 1
