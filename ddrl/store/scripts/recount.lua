-- fenced
-- Raise the counts of a server that came back older to those of the fragments that the learner has read.
-- KEYS: 1 state (hash), 2 producers (hash), 3 counter of producers.
-- ARGV: 1 token, 2 fragments and 3 transitions that were appended in all, at least, 4 least producer id; then of each
--       producer its id, the incarnation and number of its newest fragment read, and its record (JSON) for a server
--       that has none. Answer: 1.
redis.call('HDEL', KEYS[2], '')  -- first, so that the script works at maxmemory
for i, name in ipairs({'appended_fragments', 'appended_steps'}) do
  local counted = tonumber(redis.call('HGET', KEYS[1], name) or 0)
  if counted < tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], name, ARGV[i + 1]) end
end
if tonumber(redis.call('GET', KEYS[3]) or 0) < tonumber(ARGV[4]) then redis.call('SET', KEYS[3], ARGV[4]) end
for i = 5, #ARGV, 4 do
  local stored, seq = redis.call('HGET', KEYS[2], ARGV[i]), tonumber(ARGV[i + 2])
  local producer = cjson.decode(stored or ARGV[i + 3])
  if stored and producer.incarnation == ARGV[i + 1] and producer.seq < seq then
    producer.fragments, producer.seq = producer.fragments + seq - producer.seq, seq
  end
  redis.call('HSET', KEYS[2], ARGV[i], cjson.encode(producer))
end
return 1
