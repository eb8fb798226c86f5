-- Read the newest entries of a stream that workers may write, and no more of them than fits.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 largest id, 3 most entries, 4 most bytes of them all, 5 most bytes of one.
-- Answer: entries, the newest first.
local found, bytes, newest = {}, 0, ARGV[2]
repeat
  local page = redis.call('XREVRANGE', KEYS[1], newest, '(' .. ARGV[1], 'COUNT', 100)
  for _, entry in ipairs(page) do
    local size = 0
    for _, part in ipairs(entry[2]) do size = size + #part end
    if size <= tonumber(ARGV[5]) then
      bytes = bytes + size
      if bytes > tonumber(ARGV[4]) or #found == tonumber(ARGV[3]) then return found end
      found[#found + 1] = entry
    end
    newest = '(' .. entry[1]
  end
until #page == 0
return found
