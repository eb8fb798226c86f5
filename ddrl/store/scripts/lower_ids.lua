-- fenced
-- Give entries new ids where theirs are later than any clock says: after the largest id a stream takes no entry.
-- KEYS: 1 state (hash), then streams. ARGV: 1 token, 2 the latest id that a clock gives, 3 an id that later ones follow.
-- Answer: number of entries with new ids.
local num = 0
for i = 2, #KEYS do
  local last = redis.call('EXISTS', KEYS[i]) == 1 and redis.call('XINFO', 'STREAM', KEYS[i])
  for at = 1, last and #last or 0, 2 do
    if last[at] == 'last-generated-id' then last = last[at + 1] end
  end
  if last and #string.match(last, '%d+') > #string.match(ARGV[2], '%d+') then
    local entries = redis.call('XRANGE', KEYS[i], '(' .. ARGV[2], '+')
    for _, entry in ipairs(entries) do redis.call('XDEL', KEYS[i], entry[1]) end
    local newest = redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', 1)[1]
    local options = {'ENTRIESADDED', redis.call('XLEN', KEYS[i]), 'MAXDELETEDID', '0-0'}
    local reply = redis.pcall('XSETID', KEYS[i], ARGV[3], unpack(options))
    if reply.err then redis.call('XSETID', KEYS[i], newest[1], unpack(options)) end  -- which is later
    for _, entry in ipairs(entries) do redis.call('XADD', KEYS[i], '*', unpack(entry[2])) end
    num = num + #entries
  end
end
return num
