-- Read the newest entries of a stream that workers may write, and no more of them than fits.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 largest id, 3 most fields and values to look at, 4 most bytes of all entries,
--       5 most bytes of one, which has 100 fields at most.
-- Answer: id of the newest, "" if there is none; entries, the newest first.
local found, parts, bytes, before, last = {}, 0, 0, ARGV[2], ''
repeat
  local page = redis.call('XREVRANGE', KEYS[1], before, '(' .. ARGV[1], 'COUNT', 20)
  for _, entry in ipairs(page) do
    local num, size = #entry[2], 0
    if last == '' then last = entry[1] end
    parts, before = parts + num + 1, '(' .. entry[1]
    if parts > tonumber(ARGV[3]) then return {last, found} end
    for i = 1, math.min(num, 200) do size = size + #entry[2][i] end
    if num <= 200 and size <= tonumber(ARGV[5]) then
      bytes = bytes + size
      if bytes > tonumber(ARGV[4]) then return {last, found} end
      found[#found + 1] = entry
    end
  end
until #page == 0
return {last, found}
