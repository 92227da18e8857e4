-- Ends a job in one step: emits its last tokens and its terminal event, stores its stats and output, and drops its entry.
-- This works also when Redis is full: the end of a job frees more memory than it needs.
--
-- KEYS[1]    job       hash of the job
-- KEYS[2]    events    stream of the job's events
-- KEYS[3]    stream    job stream that the job was claimed from
-- KEYS[4]    dead      stream of dead letters
-- ARGV[1]    attempt   number of the caller's attempt
-- ARGV[2]    worker    id of the caller
-- ARGV[3]    group     consumer group of the job stream
-- ARGV[4]    entry     id of the job's entry
-- ARGV[5]    channel   channel of the job's events
-- ARGV[6]    payload   msgpack of the event `tokens` with the tokens since the last flush; '': there are none
-- ARGV[7]    offset    number of tokens of the job before those in the payload
-- ARGV[8]    count     number of tokens in the payload
-- ARGV[9]    terminal  msgpack of the terminal event
-- ARGV[10]   status    'finished' | 'failed'
-- ARGV[11]   started   '1': the job has had a slot in this attempt; '0': it has not
-- ARGV[12]   reason    reason of the dead letter that the job becomes; '': none
-- ARGV[13]   id        id of the job
-- ARGV[14]   dead_ttl  shortest life of a dead job's keys, in ms
-- ARGV[15]   max_dead  number of entries stored in the stream of dead letters
-- ARGV[16]   progress  msgpack of an array with the events `prompt_progress` since the last flush; '': there are none
-- ARGV[17..] fields    further fields of the hash: name, value, name, value, ...
--
-- Returns 'ok'    the job has ended
--         'lost'  a newer attempt exists, or the job has ended, perhaps by an earlier try of this call
--         the number of tokens that Redis has, if the payload does not begin there: the reply to a flush was lost, or Redis
--         has lost tokens. The worker calls again with the tokens from there on, so that no event repeats tokens.

local job, events, stream = KEYS[1], KEYS[2], KEYS[3]
local attempt, worker, group, entry, channel, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

-- Compare the worker too: if a failover lost the start of an attempt, two workers may have the same number.
local state = redis.call('HMGET', job, 'status', 'attempt', 'worker', 'started_attempt', 'generated')
if not state[1] or has_ended(state[1]) or state[2] ~= attempt or state[3] ~= worker then
  remove_death(job, attempt, worker)
  return 'lost'
end
local stored, offset = tonumber(state[5] or '0') or 0, tonumber(ARGV[7])
if payload ~= '' and stored ~= offset and stored <= offset + tonumber(ARGV[8]) then
  return stored
end
allow_writes_when_full(job)
if ARGV[11] == '1' and state[4] ~= attempt then -- the job ended before the flush that would have started it
  redis.call('HSETNX', job, 'started_ms', now_ms())
  emit_last(events, channel, cmsgpack.pack({type = 'started', attempt = tonumber(attempt), worker = worker}))
end
for _, event in ipairs(ARGV[16] ~= '' and cmsgpack.unpack(ARGV[16]) or {}) do
  redis.call('PUBLISH', channel, event)
end
if payload ~= '' then
  emit_last(events, channel, payload) -- `terminate` deletes the events, unless they are stored for `events_ttl_ms`
end
local fields = {}
for i = 17, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
terminate(job, events, channel, stream, group, entry, ARGV[10], ARGV[9], fields)
if ARGV[12] ~= '' then
  add_dead_letter(job, events, KEYS[4], ARGV[13], ARGV[12], '', ARGV[14], ARGV[15])
end
return 'ok'
