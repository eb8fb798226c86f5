-- fenced
-- Raise the counts of a server that came back older to those of the fragments that the learner has read.
-- KEYS: 1 state (hash), 2 producers (hash), 3 counter of producers, 4 counts (hash).
-- ARGV: 1 token, 2 fragments and 3 transitions that were appended in all, at least, 4 least producer id; then of each
--       producer its id, the incarnation and number of its newest fragment read, and its record (JSON) for a server
--       that has none. Answer: 1.
redis.call('HDEL', KEYS[2], '')  -- first, so that the script works at maxmemory
for i, name in ipairs({'appended_fragments', 'appended_steps'}) do
  local counted = number(redis.call('HGET', KEYS[4], name)) or 0
  if counted < tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[4], name, ARGV[i + 1]) end
end
if tonumber(redis.call('GET', KEYS[3]) or 0) < tonumber(ARGV[4]) then redis.call('SET', KEYS[3], ARGV[4]) end
for i = 5, #ARGV, 4 do
  local stored, seq = redis.call('HGET', KEYS[2], ARGV[i]), tonumber(ARGV[i + 2])
  local producer = decode(stored) or cjson.decode(ARGV[i + 3])
  local newest_seq, fragments = number(producer.seq) or -1, number(producer.fragments) or 0
  if producer.incarnation == ARGV[i + 1] and newest_seq < seq then
    producer.fragments, producer.seq = fragments + seq - newest_seq, seq
  end
  local is_number, record = pcall(cjson.encode, producer)  -- a worker may have written nan
  redis.call('HSET', KEYS[2], ARGV[i], is_number and record or ARGV[i + 3])
end
return 1
