-- Reads new entries of job streams and gives each entry a lease, so that no entry is left without a lease if the worker
-- dies. The streams of a paused queue are not read. While tenants wait, entries are read in their turns (`_turns.lua`).
--
-- The hashes of the jobs are not in KEYS: the entries name the jobs. All keys have the hash tag of the stream.
--
-- KEYS[..]  streams   job streams
-- ARGV[1]   group     consumer group of the job streams
-- ARGV[2]   count     number of entries to read from each stream at most
-- ARGV[3]   lease_ms  how long the worker keeps an entry without a renewal, in ms
--
-- Returns an array with {stream, entries} for each stream that has new entries. `entries` is an array with
-- {id, {name, value, ...}} for each entry.

local group, lease_ms, left = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local count -- number of entries to read from the next stream at most
local MAX_PASSED = 1000 -- entries of tenants that one call passes in the order of a stream, about

-- Returns up to `count` entries of a stream in which no entry belongs to a tenant.
local function read_all(stream)
  local reply = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', count, 'STREAMS', stream, '>')
  local entries = reply and reply[1][2] or {}
  for _, entry in ipairs(entries) do
    renew_lease(stream, group, WAITING, entry[1], lease_ms)
  end
  return entries
end

-- Returns whether an entry is or was claimed in a turn of its tenant. If an entry of a tenant neither waits nor is
-- pending, it was lost or another client has written it. Then it is read like an entry without a tenant.
local function belongs_to_turn(stream, entry)
  local fields = entry[2]
  if fields[3] ~= 'tenant' then
    return false
  end
  local _, line = turn_keys(stream, fields[4])
  return redis.call('ZSCORE', line, entry[1]) or #redis.call('XPENDING', stream, group, entry[1], entry[1], 1) > 0
end

local function lease(stream, entry)
  redis.call('XCLAIM', stream, group, WAITING, 0, entry[1], 'IDLE', EXPIRED_IDLE_MS - lease_ms, 'FORCE', 'JUSTID')
end

-- Appends to `found` up to `n` entries in the order of the stream, without entries of tenants. Entries are read with
-- NOACK, because entries that were claimed in a turn are pending already. The lease makes an entry pending.
local function read_in_order(stream, n, found)
  local n_read, last = 0, #found + n
  repeat
    local wanted = last - #found
    local reply = redis.call('XREADGROUP', 'GROUP', group, WAITING, 'COUNT', wanted, 'NOACK', 'STREAMS', stream, '>')
    local entries = reply and reply[1][2] or {}
    for _, entry in ipairs(entries) do
      if not belongs_to_turn(stream, entry) then
        lease(stream, entry)
        found[#found + 1] = entry
      end
    end
    n_read = n_read + #entries
  until #found == last or #entries < wanted or n_read >= MAX_PASSED
end

-- Appends to `found` up to `count` entries in the turns of the tenants.
local function read_in_turns(stream, turns, shares, found)
  -- Reads the oldest entry of a tenant. Returns nil if it was deleted.
  local function read_turn(tenant)
    local id = redis.call('ZPOPMIN', turns .. ':' .. tenant)[1]
    redis.call('HINCRBY', shares, '*waiting', -1)
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry then
      lease(stream, entry)
    end
    return entry
  end

  -- Reads the oldest entry of a job without a tenant that was added while no tenant waited. From now on the job counts
  -- like the jobs of a tenant. Returns nil if there is no such entry.
  local function read_older()
    local older = {}
    read_in_order(stream, 1, older)
    local job = older[1] and parts_of(stream) .. 'job:' .. tostring(older[1][2][2])
    if job and redis.pcall('HEXISTS', job, 'status') == 1 then
      redis.call('HSET', job, 'tenant', '')
    end
    return older[1]
  end

  redis.call('PERSIST', stream) -- lets the later writes pass although Redis is full
  local n_pending = redis.call('XPENDING', stream, group)[1]
  local n_older = redis.call('XLEN', stream) - n_pending - (redis.call('HGET', shares, '*waiting') or 0)
  if n_older > 0 and not redis.call('ZSCORE', turns, '') then
    set_turn(turns, shares, '')
  end
  while #found < count do
    local tenant = redis.call('ZRANGE', turns, 0, 0)[1]
    local n_left = tenant and redis.call('ZCARD', turns .. ':' .. tenant) or 0
    if not tenant or (tenant == '' and n_left == 0 and redis.call('ZCARD', turns) == 1) then -- no tenant waits any more
      redis.call('ZREM', turns, '')
      read_in_order(stream, count - #found, found)
      break
    end
    local entry
    if tenant == '' and n_older > 0 then
      entry = read_older()
      n_older = entry and n_older - 1 or 0
    elseif n_left > 0 then
      entry, n_left = read_turn(tenant), n_left - 1
    end
    if entry then
      found[#found + 1] = entry
      count_claimed(turns, shares, tenant, 1)
    end
    if n_left > 0 or (tenant == '' and n_older > 0) then
      set_turn(turns, shares, tenant)
    else
      redis.call('ZREM', turns, tenant)
    end
  end
  drop_counters(turns, shares)
end

-- Returns up to `count` entries of a stream.
local function read_stream(stream)
  local found, turns, _, shares = {}, turn_keys(stream)
  if redis.call('EXISTS', turns, shares) == 0 then
    return read_all(stream)
  elseif redis.call('EXISTS', turns) == 1 then
    read_in_turns(stream, turns, shares, found)
  else
    read_in_order(stream, count, found)
  end
  return found
end

local replies = {}
for _, stream in ipairs(KEYS) do
  count = math.min(tonumber(ARGV[2]), left)
  if count > 0 and not is_paused(stream) then
    local is_read, found = pcall(read_stream, stream)
    if not is_read and #replies == 0 then
      return type(found) == 'table' and found or {err = tostring(found)}
    elseif not is_read then
      break -- the next call returns the error: the caller must get the entries that have leases now
    elseif #found > 0 then
      replies[#replies + 1] = {stream, found}
      left = left - #found
    end
  end
end
return replies
