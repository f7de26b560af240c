// Browsers refuse workers to pages that are opened from a file system. Search has one: there, it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.inside = this.frame.contentWindow
      // What a worker posts goes to whoever made it.
      this.inside.postMessage = (data) => this.onmessage?.({ data })
      const script = this.inside.document.createElement("script")
      script.src = url
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve))
      script.addEventListener("error", (error) => this.onerror?.(error))
      this.inside.document.body.append(script)
    }

    async postMessage(data) {
      await this.ready
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
